#!/usr/bin/env bash
# Installs Chromium and its driver, in which the tests of the report open its pages, where they are
# missing and this user may: root, with apt-get. Elsewhere it says so, and those tests are skipped.
set -euo pipefail

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
  exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
  echo "no Chromium, and installing it takes root and apt-get: the tests of the report in a browser are skipped" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core >/dev/null
