"""A server among hostile clients, faults and ordinary requests: ``python -m tests.soak``, or ``make soak``."""
