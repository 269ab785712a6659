"""Non-public names of upstream's that traces of several ranks use."""
