"""The command line. Core's commands stand here, where nothing imports torch, and come in by the hook of any plugin."""

from infer.commands import bench, chat, demo, generate, plugins, serve, settings

COMMANDS = tuple(module.COMMAND for module in (serve, generate, chat, demo, bench, plugins, settings))
