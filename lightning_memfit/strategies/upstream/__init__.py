"""Every private name of upstream that the strategies use, by the library it belongs to."""
