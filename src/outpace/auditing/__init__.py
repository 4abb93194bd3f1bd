"""Statistical tests of losslessness for users and for CI, and planted faults."""
