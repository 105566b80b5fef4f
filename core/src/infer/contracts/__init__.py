"""What plugins, the engine and its clients agree on: types and rules, but no backend's behaviour.

Plugins import these by their public names, ``infer.protocols`` and ``infer.hookspecs``.
"""
