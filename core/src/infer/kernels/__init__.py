"""What every kernel computes, in torch."""
