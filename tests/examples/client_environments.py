"""Environments for examples/clients: python -m tests.examples.client_environments FOLDER.

Each client has a virtual environment of its own in FOLDER, because they need different versions of
the same packages. An environment that exists stays as it is.
"""

import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "anthropic_client": "anthropic",
    "instructor_client": "instructor",
    "langchain_chat": "langchain-openai",
    "litellm_client": "litellm",
    "ollama_client": "ollama",
    "openai_agents": "openai-agents",
    "pydantic_ai_agent": "pydantic-ai-slim[openai]",
}
"""Package of each script."""


def interpreter(folder: Path, client: str) -> Path:
    """Return the interpreter of a client's environment."""
    return folder / client / "bin" / "python"


def main() -> None:
    folder = Path(sys.argv[1])
    for client, package in PACKAGES.items():
        done = folder / client / "installed"
        if done.exists():
            continue
        subprocess.run([sys.executable, "-m", "venv", str(folder / client)], check=True)
        pip = [str(interpreter(folder, client)), "-m", "pip", "install", "-qq"]
        subprocess.run([*pip, "--disable-pip-version-check", package], check=True)
        done.touch()
        print(f"{client}: {package}")


if __name__ == "__main__":
    main()
