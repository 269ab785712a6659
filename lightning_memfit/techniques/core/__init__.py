"""Building blocks of techniques: the record, the registry, settings, costs, facts and reversible wrapping."""
