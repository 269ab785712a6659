"""Command line: a LightningCLI with one file per subcommand. Nothing imports it."""
