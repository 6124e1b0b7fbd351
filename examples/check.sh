#!/bin/sh
# Install the core's wheel and the example's into a fresh environment, without any path to this
# checkout, and check the example there; write, install and check a new plugin; then follow the
# manual's tutorial as a new user does, within ten minutes.
# Expects the project's environment in PATH (make test-third-party).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Build from copies, so that nothing is left in the tree.
mkdir "$work/core"
cp -r "$root/bflcore" "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" "$work/core"
cp -r "$root/examples/third-party" "$work/example"
install="-m pip install --quiet --disable-pip-version-check --constraint $root/constraints.txt"
python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/wheels" \
  "$work/core" "$work/example"

"${PYTHON:-python3}" -m venv "$work/venv"
python="$work/venv/bin/python"
# shellcheck disable=SC2086
$python $install "$work"/wheels/*.whl pytest
cd "$work"
rm -rf core
unset PYTHONPATH VIRTUAL_ENV
PATH="$work/venv/bin:/usr/bin:/bin"
bfl list-plugins
bfl check-plugin swag
python -m pytest -q -p no:cacheprovider example/tests
bfl run swag --data synthetic --rounds 2 --quiet

for kind in inference method aggregator hyper dataset model; do
  bfl new-plugin "new-$kind" --kind "$kind"
  # shellcheck disable=SC2086
  $python $install "./bfl-new-$kind"
  bfl check-plugin "new-$kind"
  python -m pytest -q -p no:cacheprovider "bfl-new-$kind"
done
bfl run new-inference --data synthetic --rounds 2 --quiet
python -c "import sys, bflcore; sys.exit(bflcore.__file__.startswith('$root'))"

mkdir tutorial
cp "$root/examples/follow.py" "$root/docs/start/tutorial.md" tutorial
(cd tutorial && timeout 600 python follow.py tutorial.md) || {
  echo "the tutorial failed, or took more than ten minutes" >&2
  exit 1
}
echo "the core, the example, new plugins and the tutorial work from their wheels"
