#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what the tests and the site need and pip does not bring: Ceph and graphviz, as Debian packages.
# `make servers` and CI run it; who does not want it does without, and the tests of Ceph skip.
# Says nothing and takes no time where all is there.
set -euo pipefail

programs=(dot ceph ceph-mon ceph-osd monmaptool rados radosgw radosgw-admin setpriv)
# Without ceph-mgr: a manager only reports, and nobody asks it here.
packages=(graphviz ceph-common ceph-mon ceph-osd radosgw util-linux)

missing() {
    local program
    for program in "${programs[@]}"; do
        command -v "$program" >/dev/null || echo "$program"
    done
}

fail() {
    echo "tests/servers/install.sh: $*; missing: $(missing | xargs)" >&2
    exit 1
}

if [[ -z "$(missing)" ]]; then
    exit 0
fi
command -v apt-get >/dev/null || fail "needs a system with apt-get"
as_root=()
if [[ "$(id -u)" != 0 ]]; then
    sudo -n true 2>/dev/null || fail "needs root, or sudo without a password"
    as_root=(sudo -n)
fi

apt_get() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get --yes --quiet=2 \
        -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" \
        </dev/null >/dev/null
}

for pause_s in 5 20 0; do
    if apt_get update && apt_get install --no-install-recommends "${packages[@]}"; then
        break
    fi
    sleep "$pause_s"
done
[[ -z "$(missing)" ]] || fail "apt-get did not bring everything"
