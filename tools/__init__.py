"""Commands for those who work on fastclip."""
