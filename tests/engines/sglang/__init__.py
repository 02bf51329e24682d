"""Tests of the SGLang adapter, driven by SGLang's own code."""
