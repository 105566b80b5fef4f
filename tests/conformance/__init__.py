"""vLLM's and llama.cpp's own tests of routes that infer has, too, against infer: ``python -m tests.conformance``."""
