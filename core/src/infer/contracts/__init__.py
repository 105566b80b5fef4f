"""What plugins, the engine and its clients agree on: types and rules, no behaviour of a backend.

Plugins import these by their public names, ``infer.protocols`` and ``infer.hookspecs``.
"""
