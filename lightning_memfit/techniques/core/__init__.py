"""What techniques are made of: the record, the registry, settings, costs, facts and reversible wrapping."""
