"""What plugins, the engine and its clients agree on: types and rules, but no backend's behavior.

There is one file for each kind of reader, with all that somebody who writes such a plugin needs: protocols, contexts,
factories and registrations.

    a cache pool: cache        a scheduler: scheduler      an endpoint: server
    kernels: kernels           drafts: proposer            a command: command
    a model family: model      tool calls, reasoning: text
    checkpoints: weights       an observer: records
    structured outputs: grammar

``registration`` has what every plugin states, ``attention`` what caches, kernels and models share, ``sections`` the
settings that core hands on, ``hooks`` all hooks on one page, and ``request`` and ``params`` what clients ask for.

Shape legend, used throughout: T tokens of a ragged batch, B sequences in it, D hidden size, H query heads, K key/value
heads, E head size, V vocabulary size, N wanted rows, P blocks per sequence. Of a weight [N, K], N is the number of
outputs and K the number of inputs. In mixtures of experts, X is the number of experts, J of those that a token has, and
I the size of an expert's hidden values.
"""
