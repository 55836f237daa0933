#!/usr/bin/env bash
# Installs Chromium and its driver, in which the tests of the report and of the documentation open
# pages, where they are missing: as root, with apt-get. Fails where that cannot be done.
set -euo pipefail

present() { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }

if present; then
  exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
  echo "no Chromium with chromedriver, and installing them takes root and apt-get" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# Without a network the first of these ends well and the second says what it did not find.
if ! { apt-get update -qq &&
  apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core >/dev/null &&
  present; }; then
  echo "Chromium with chromedriver could not be installed with apt-get" >&2
  exit 1
fi
