"""From text to tokens and back: templates, encoding, tool calls and reasoning, grammars, detokenization."""
