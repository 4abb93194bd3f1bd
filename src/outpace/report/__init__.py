"""Report: result files in, one self-contained HTML page out."""
