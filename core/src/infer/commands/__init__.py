"""The command line. Core's commands are registered by the same hook as a plugin's. Nothing here imports torch when it
is loaded."""

from infer.commands import chat, doctor, generate, plugins, settings

COMMANDS = tuple(module.COMMAND for module in (generate, chat, doctor, plugins, settings))
