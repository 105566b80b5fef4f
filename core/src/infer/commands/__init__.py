"""The command line. Core's commands are registered by the same hook as a plugin's. Nothing here imports torch when it
is loaded."""
