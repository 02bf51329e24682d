"""The adapter of SGLang, driven by SGLang's own code."""
