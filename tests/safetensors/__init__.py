"""Safetensors."""
