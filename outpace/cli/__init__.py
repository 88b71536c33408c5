"""The command line: one file a command. It imports the other floors late, so that --help is quick."""
