"""Exit 0 if the server in this container can serve now."""

import os
import sys
from urllib.error import URLError
from urllib.request import urlopen

try:
    with urlopen(f"http://127.0.0.1:{os.environ.get('TURNOUT_PORT', '30000')}/ready", timeout=3) as reply:
        sys.exit(0 if reply.status == 200 else 1)
except (URLError, OSError) as error:
    sys.exit(f"not ready: {error}")
