"""What was measured, as one page that needs nothing beside it: files of results in, HTML out."""
