"""Hugging Face folders in and out: ``config.json`` and safetensors of Llama-, Mistral- and Qwen-type models.

Neither reading nor writing imports transformers.
"""

from lightning_dcp.models.megatron.huggingface.config import HuggingFaceConfig, parse_config, read_config
from lightning_dcp.models.megatron.huggingface.describe import describe
from lightning_dcp.models.megatron.huggingface.load import load_huggingface
from lightning_dcp.models.megatron.huggingface.save import save_huggingface

__all__ = ["HuggingFaceConfig", "describe", "load_huggingface", "parse_config", "read_config", "save_huggingface"]
