"""What all tests share: where the generators of random graphs live."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "property"))
