# Shared by the scripts that fetch packages: unpacks them in a cache, installs nothing, and does not change the system's
# apt sources. To be sourced with `name` set: the script's name and its folder's name in the cache ($HOTLIFT_CACHE,
# by default .cache in the repository).
#
# shellcheck shell=sh

cache=${HOTLIFT_CACHE:-$(cd "$(dirname "$0")/.." && pwd)/.cache}
# Folder of the result; it is built in `work`, so that an interrupted run leaves none.
top=$cache/$name
work=$top.part
# Library folders of packages.
usr_lib=usr/lib/x86_64-linux-gnu

fail() {
	echo "$name: $*" >&2
	exit 1
}

begin() {
	command -v apt-get >/dev/null && command -v dpkg >/dev/null || fail "needs Debian's apt-get and dpkg"
	[ "$(dpkg --print-architecture)" = amd64 ] || fail "the packages are for x86-64 only"
	rm -rf "$work"
	mkdir -p "$work/lists/partial" "$work/debs/partial" "$work/root"
	: >"$work/status"
}

# With the empty status file nothing counts as installed: every library comes from the archive, independent of the host.
# The sandbox user of apt cannot write to a cache in a home directory.
apt() {
	apt-get -q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
		-o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status" -o Dir::Cache::pkgcache= \
		-o Dir::Cache::srcpkgcache= -o Dir::Cache::archives="$work/debs" -o Debug::NoLocking=1 \
		-o Acquire::Languages=none -o APT::Sandbox::User=root -o APT::Update::Error-Mode=any "$@" \
		>>"$work/log" 2>&1
}

# The lists of Debian's suites. Forky is not released: a mirror may have a Release file with a valid signature that has
# expired.
debian() {
	for suite in "$@"; do
		late=""
		[ "$suite" != forky ] || late=" check-valid-until=no"
		echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg$late]" \
			"http://deb.debian.org/debian $suite main"
	done >"$work/sources.list"
	apt update || fail "Debian's archive is out of reach (see $work/log)"
}

# Downloads packages and all their dependencies, as `apt-get install` selects them.
download() {
	apt install -y --no-install-recommends --download-only "$@" ||
		fail "a package could not be downloaded (see $work/log)"
}

unpack() {
	for deb in "$@"; do
		dpkg -x "$deb" "$work/root" || fail "$deb could not be unpacked"
	done
}

# Moves the libraries that some packages have in /lib to the others, so that the loader needs one folder only.
merge_lib() {
	if [ -d "$work/root/lib/x86_64-linux-gnu" ]; then
		cp -a "$work/root/lib/x86_64-linux-gnu/." "$work/root/$usr_lib/"
	fi
	[ -x "$work/root/$usr_lib/ld-linux-x86-64.so.2" ] || fail "the C library has no loader (see $work)"
}

finish() {
	rm -rf "$work/debs" "$work/lists" "$work/root/usr/share/doc" "$work/root/usr/share/locale" \
		"$work/root/usr/share/man" "$top"
	mv "$work" "$top"
}

# Finishes, checks that QEMU runs, and prints the folder of the programs.
finish_programs() {
	finish
	"$top/bin/qemu-system-x86_64" --version >/dev/null || {
		mv "$top" "$work"
		fail "the unpacked QEMU does not run (kept in $work)"
	}
	echo "$top/bin"
}

# Prints the path of a directory with a QEMU of Debian's, from the last of these suites; fetches it if it is
# missing. The directory has a wrapper for each program. It starts the program with the loader that it was built for, and
# with its own libraries and data.
debian_qemu() {
	if [ -x "$top/bin/qemu-system-x86_64" ]; then
		echo "$top/bin"
		return
	fi
	begin
	debian "$@"
	while [ $# -gt 1 ]; do shift; done
	download -t "$1" qemu-system-x86 qemu-system-common qemu-system-data qemu-utils
	unpack "$work"/debs/*.deb
	merge_lib
	mkdir "$work/bin"
	wrapper qemu-system-x86_64 "-L \$root/usr/share/qemu -L \$root/usr/share/seabios"
	wrapper qemu-img ""
	finish_programs
}

# Writes a wrapper for a program of `debian_qemu`, with these arguments before those of the caller.
wrapper() {
	cat >"$work/bin/$1" <<WRAPPER
#!/bin/sh
root=$top/root
lib=\$root/$usr_lib
export QEMU_MODULE_DIR="\$lib/qemu"
exec "\$lib/ld-linux-x86-64.so.2" --argv0 $1 --library-path "\$lib" "\$root/usr/bin/$1" $2 "\$@"
WRAPPER
	chmod +x "$work/bin/$1"
}
