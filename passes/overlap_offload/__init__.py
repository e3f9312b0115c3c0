"""overlap_offload: checkpoint inputs go to the host and come back while the device computes."""
