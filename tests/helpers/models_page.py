"""Writes the table of docs/models.md from the rows of docs/families.md.

python tests/helpers/models_page.py
"""

import re
from pathlib import Path

from family_published import rows_of_checkpoints
from family_table import rows_of

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FAMILIES = DOCS / "models.md", DOCS / "families.md"
HEAD = "| checkpoint | engine | loss | row |\n|---|---|---|---|"
STATUS = {"right, fused": "runs fused", "right, unfused": "runs unfused", "right": "right"}
_TEXT = """
Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B Qwen/Qwen2.5-7B-Instruct Qwen/Qwen3-Next-80B-A3B-Instruct Qwen/Qwen3.5-9B
Qwen/Qwen3.5-35B-A3B meta-llama/Llama-3.1-8B-Instruct meta-llama/Llama-3.2-1B-Instruct
meta-llama/Llama-4-Scout-17B-16E-Instruct mistralai/Mistral-7B-Instruct-v0.3 google/gemma-2-9b google/gemma-3-1b-it
google/gemma-3-4b-it google/gemma-4-E2B-it google/gemma-4-31B-it google/gemma-4-26B-A4B-it
arcee-ai/Trinity-Mini openai/gpt-oss-20b microsoft/phi-4
microsoft/Phi-4-mini-instruct deepseek-ai/DeepSeek-V3.1 deepseek-ai/DeepSeek-V3.2 deepseek-ai/DeepSeek-V4-Flash
moonshotai/Moonlight-16B-A3B-Instruct zai-org/GLM-4-9B-0414 zai-org/GLM-4.5-Air zai-org/GLM-4.7-Flash zai-org/GLM-5
MiniMaxAI/MiniMax-M2 nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 HuggingFaceTB/SmolLM2-135M-Instruct
HuggingFaceTB/SmolLM3-3B allenai/OLMo-2-1124-7B allenai/Olmo-3-7B-Think ByteDance-Seed/Seed-OSS-36B-Instruct
ibm-granite/granite-3.3-8b-instruct ibm-granite/granite-4.0-h-micro LiquidAI/LFM2-1.2B tiiuae/Falcon-H1-0.5B-Base
baidu/ERNIE-4.5-21B-A3B-PT LGAI-EXAONE/EXAONE-4.0-32B tencent/Hunyuan-7B-Instruct tencent/Hy3-preview
CohereLabs/c4ai-command-r7b-12-2024 swiss-ai/Apertus-8B-Instruct-2509 bigcode/starcoder2-3b
"""
"""Checkpoints that people train often. Their rows are in family_published.py."""
MULTIMODAL = {
    "Qwen/Qwen3-VL-8B-Instruct": "qwen3_vl",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "qwen3_vl_moe",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "mistral3",
    "mistralai/Ministral-3-8B-Instruct-2512": "mistral3-ministral3",
    "moonshotai/Kimi-K2.5": "kimi_k25",
    "zai-org/GLM-4.1V-9B-Thinking": "glm4v",
    "zai-org/GLM-4.5V": "glm4v_moe",
    "OpenGVLab/InternVL3-8B-hf": "internvl",
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": "llava_onevision",
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": "smolvlm",
    "mistralai/Voxtral-Mini-3B-2507": "voxtral",
}


def table() -> str:
    """Write the table of checkpoints."""
    results = {result.family: result for result in rows_of(FAMILIES.read_text())}
    published = rows_of_checkpoints()
    rows = {**{name: published[name] for name in _TEXT.split()}, **MULTIMODAL}
    lines = [
        f"| {name} | {STATUS.get(result.engine.kind, result.engine.kind)} | {result.trainer.kind} | {row} |"
        for name, row in sorted(rows.items(), key=lambda item: item[0].lower())
        for result in [results[row]]
    ]
    return "\n".join([HEAD, *lines])


def main() -> None:
    page = PAGE.read_text()
    PAGE.write_text(re.sub(re.escape(HEAD) + r"(\n\|.*)*", lambda _: table(), page))


if __name__ == "__main__":
    main()
