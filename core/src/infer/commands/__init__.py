"""The command line. Core's commands are registered by the same hook as a plugin's. Nothing here imports torch when it
is loaded."""

from infer.commands import chat, doctor, generate, plugins, serve, settings

COMMANDS = tuple(module.COMMAND for module in (serve, generate, chat, doctor, plugins, settings))
