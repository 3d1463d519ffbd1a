"""Which server and GPU holds which expert block, and when that should change."""
