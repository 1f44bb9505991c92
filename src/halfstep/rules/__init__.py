"""The rules: one file each, with its card, in families. A rule hears a trace and yields what it found."""
