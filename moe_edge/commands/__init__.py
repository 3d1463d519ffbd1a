"""The commands: how they start, their flags, gin files, signals and results folders."""
