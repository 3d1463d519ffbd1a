"""The commands, one file each: text for `--help`, and `main()`, which never returns."""
