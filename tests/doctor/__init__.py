"""What `kvflow doctor` finds on machines that were broken for it."""
