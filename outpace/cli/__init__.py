"""The command line: one file a command. Heavy packages are imported inside functions, so that --help is quick."""
