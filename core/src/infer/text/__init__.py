"""From text to tokens and back: templates, encoding, reasoning, formats of tool calls, grammars, detokenization."""
