"""The pipeline, one file a stage, in the order data flows."""
