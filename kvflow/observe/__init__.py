"""What a person or a machine can see of kvflow from outside."""
