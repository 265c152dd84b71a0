# Shared by .ci/run and .ci/nightly.

stage() { # stage NAME COMMAND...: runs it and says how long it took
  local name="$1" begin=$SECONDS
  shift
  echo "== ${name}"
  "$@"
  echo "== ${name}: $((SECONDS - begin)) s"
}

share_packages() { # share_packages ENVIRONMENT: it sees this checkout and what .venv has installed
  local site dependencies
  site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  dependencies=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n%s\n' "${PWD}" "${dependencies}" > "${site}/dependencies.pth"
}
