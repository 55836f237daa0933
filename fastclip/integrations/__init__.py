"""Training frameworks: a module for each, which imports that framework alone, and nothing before
it is imported itself."""
