"""What kvflow's own work costs when there is much of it: many transfers in flight, many peers."""
