"""Core's own commands."""

from infer.commands import chat, doctor, generate, plugins, settings

COMMANDS = tuple(module.COMMAND for module in (generate, chat, doctor, plugins, settings))
