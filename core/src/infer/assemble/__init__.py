"""From settings to a running engine: every part is chosen and made here."""
