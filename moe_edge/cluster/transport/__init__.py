"""What carries calls, blocks and control between the processes of a cluster."""
