"""The endpoints, one file each: its body, the shape of its answer and its handler."""
