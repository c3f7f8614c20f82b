//! Sends and receives guest pages over blocking stream sockets, without a copy in this process.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use libc::{c_int, iovec, msghdr};

use crate::GuestRun;
pub use crate::tcp_info::{TcpSending, unacknowledged};

/// Maximum number of segments in one system call (`IOV_MAX`, the same on every Linux).
pub(crate) const IOV_MAX: usize = 1024;

/// Segment array for the calls in this module. It is reused, so the calls do not allocate.
#[derive(Debug, Default)]
pub struct IoScratch {
    segments: Vec<iovec>,
}

// SAFETY: the addresses are used only inside the call that put them there.
unsafe impl Send for IoScratch {}

impl IoScratch {
    /// Creates an empty scratch; it grows to the largest call made with it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the segments of `parts` and then `runs`; adjacent ones are joined and empty ones omitted.
    pub(crate) fn fill(&mut self, parts: &[&[u8]], runs: &[GuestRun<'_>]) -> &mut [iovec] {
        self.segments.clear();
        let parts = parts.iter().map(|p| (p.as_ptr().cast_mut(), p.len()));
        let runs = runs.iter().map(|r| (r.as_ptr(), r.len()));
        for (start, len) in parts.chain(runs).filter(|(_, len)| *len != 0) {
            match self.segments.last_mut() {
                Some(last) if last.iov_base.addr() + last.iov_len == start.addr() => {
                    last.iov_len += len;
                }
                _ => self.segments.push(iovec {
                    iov_base: start.cast(),
                    iov_len: len,
                }),
            }
        }
        &mut self.segments
    }
}

/// Limits a TCP socket's unsent bytes to `bytes` (`TCP_NOTSENT_LOWAT`). Without the limit, the receiver's acknowledgements
/// trigger the sending of queued data. If both are on one host, this takes CPU time of the receiver. Unlike a smaller send
/// buffer, this does not limit the data in flight, so a long link is still filled.
///
/// # Errors
/// The system's error. A socket that is not TCP has no such limit.
pub fn limit_unsent(fd: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    set_option(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bytes)
}

/// linux/tcp.h: `TCP_RTO_MAX_MS`.
const TCP_RTO_MAX_MS: c_int = 44;

/// Limits the interval of a TCP socket's retransmissions and window probes to `milliseconds`: 1000 to 120,000. The kernel
/// doubles the interval up to this limit; its default limit is 120,000.
///
/// # Errors
/// The system's error: this needs Linux 6.15.
pub fn limit_retransmission_interval(fd: BorrowedFd<'_>, milliseconds: u32) -> io::Result<()> {
    set_option(fd, libc::IPPROTO_TCP, TCP_RTO_MAX_MS, milliseconds)
}

fn set_option(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: u32) -> io::Result<()> {
    // SAFETY: the option's value is a u32 that outlives the call, and its size is given.
    let answer = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            ptr::from_ref(&value).cast(),
            libc::socklen_t::from(4u8),
        )
    };
    if answer == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Sends all of `head` and then `runs`. A closed peer is an error (`BrokenPipe`, `ConnectionReset`), never a signal.
///
/// The socket must be blocking. After a send timeout the result is `WouldBlock`, and an unknown number of bytes was sent.
pub fn send(
    fd: BorrowedFd<'_>,
    head: &[u8],
    runs: &[GuestRun<'_>],
    scratch: &mut IoScratch,
) -> io::Result<()> {
    send_segments(fd, scratch.fill(&[head], runs), 0)
}

/// Sends all `parts` in order, as [`send`] does: a packet's header and its compressed pages.
pub fn send_parts(fd: BorrowedFd<'_>, parts: &[&[u8]], scratch: &mut IoScratch) -> io::Result<()> {
    send_segments(fd, scratch.fill(parts, &[]), 0)
}

/// Fills all `runs` from the socket. Fails with `UnexpectedEof` if the stream ends early.
///
/// The socket must be blocking. After a receive timeout the result is `WouldBlock`.
pub fn recv(fd: BorrowedFd<'_>, runs: &[GuestRun<'_>], scratch: &mut IoScratch) -> io::Result<()> {
    let mut left = scratch.fill(&[], runs);
    while !left.is_empty() {
        let (mut message, _) = message_of(left);
        // SAFETY: the segments are guest memory, mapped writable while `runs` borrow it.
        let got = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, libc::MSG_WAITALL) };
        match check(got)? {
            None => {}
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(n) => left = advance(left, n),
        }
    }
    Ok(())
}

/// Sends all of `left` with `sendmsg` and `flags`.
pub(crate) fn send_segments(
    fd: BorrowedFd<'_>,
    mut left: &mut [iovec],
    flags: c_int,
) -> io::Result<()> {
    while !left.is_empty() {
        let (message, all) = message_of(left);
        let more = if all { flags } else { libc::MSG_MORE };
        // SAFETY: the segments are slices and guest memory, mapped and borrowed by the caller.
        let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL | more) };
        match check(sent)? {
            None => {}
            Some(0) => return Err(io::ErrorKind::WriteZero.into()),
            Some(n) => left = advance(left, n),
        }
    }
    Ok(())
}

/// Returns a message with at most the segments that one call permits, and true if it contains all `segments`.
fn message_of(segments: &mut [iovec]) -> (msghdr, bool) {
    let count = segments.len().min(IOV_MAX);
    // SAFETY: a message header of zeros has no name, no control data and no segments.
    let mut message: msghdr = unsafe { mem::zeroed() };
    message.msg_name = ptr::null_mut();
    message.msg_iov = segments.as_mut_ptr();
    message.msg_iovlen = count;
    (message, count == segments.len())
}

/// Returns the number of bytes that a call moved; `None` if a signal came first.
pub(crate) fn check(result: isize) -> io::Result<Option<usize>> {
    match usize::try_from(result) {
        Ok(n) => Ok(Some(n)),
        Err(_) => match io::Error::last_os_error() {
            e if e.kind() == io::ErrorKind::Interrupted => Ok(None),
            e => Err(e),
        },
    }
}

/// Returns the segments without their first `n` bytes.
pub(crate) fn advance(mut segments: &mut [iovec], mut n: usize) -> &mut [iovec] {
    while let Some(first) = segments.first_mut() {
        if n < first.iov_len {
            first.iov_base = first.iov_base.cast::<u8>().wrapping_add(n).cast();
            first.iov_len -= n;
            break;
        }
        n -= first.iov_len;
        segments = &mut segments[1..];
    }
    segments
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::net::UnixStream;
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::{Backing, PAGE_SIZE, RamBlock, Splicer};

    const PAGES: usize = 2600;

    /// Creates a connected pair of each kind of socket that a migration uses.
    fn pairs() -> Vec<(&'static str, OwnedFd, OwnedFd)> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let ours = TcpStream::connect(listener.local_addr().expect("bound")).expect("connect");
        let (theirs, _) = listener.accept().expect("accept");
        let (a, b) = UnixStream::pair().expect("pair");
        vec![
            ("tcp", ours.into(), theirs.into()),
            ("unix", a.into(), b.into()),
        ]
    }

    /// Creates memory in which each word contains its position.
    fn numbered(backing: Backing) -> RamBlock {
        let block = RamBlock::new("ram", PAGES * PAGE_SIZE, backing).expect("map");
        for offset in (0..block.len()).step_by(8) {
            block
                .store_u64(offset, offset as u64 | 1 << 60)
                .expect("inside");
        }
        block
    }

    fn bytes(runs: &[GuestRun<'_>]) -> Vec<u8> {
        let mut all = Vec::new();
        for run in runs {
            let at = all.len();
            all.resize(at + run.len(), 0);
            run.copy_to(&mut all[at..]);
        }
        all
    }

    type Send<'a> = Box<dyn FnMut(BorrowedFd<'_>, &[u8], &[GuestRun<'_>]) -> io::Result<()> + 'a>;

    /// Returns both send functions.
    fn senders() -> [(&'static str, Send<'static>); 2] {
        let mut scratch = IoScratch::new();
        let mut splicer = Splicer::new().expect("pipe");
        [
            (
                "send",
                Box::new(move |fd, head, runs| send(fd, head, runs, &mut scratch)),
            ),
            (
                "splice",
                Box::new(move |fd, head, runs| splicer.send(fd, head, runs)),
            ),
        ]
    }

    /// Returns runs of every shape: separate and adjacent pages, odd lengths at odd positions, empty ones, and more than one
    /// call takes.
    fn shapes(block: &RamBlock) -> Vec<Vec<GuestRun<'_>>> {
        let run = |offset, len| block.run(offset, len).expect("inside");
        let page = |page: usize| run(page * PAGE_SIZE, PAGE_SIZE);
        vec![
            vec![],
            vec![run(7, 0)],
            vec![page(3)],
            vec![page(3), page(4), page(6), run(0, 0), page(5)],
            vec![run(1, 1), run(4095, 2), run(5000, 10_001), run(3, 4093)],
            (0..PAGES / 2).map(|i| page(i * 2)).collect(),
            (0..1500).map(|i| run(i * 100 + 1, i % 90)).collect(),
            vec![run(0, block.len())],
        ]
    }

    fn cut(socket: &OwnedFd) {
        let socket = UnixStream::from(socket.try_clone().expect("dup"));
        socket.shutdown(Shutdown::Both).expect("shutdown");
    }

    #[test]
    fn a_tcp_socket_accepts_a_limit_of_unsent_bytes_and_others_refuse_it() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        limit_unsent(tcp.as_fd(), 1 << 18).unwrap();
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        limit_unsent(unix.as_fd(), 1 << 18).unwrap_err();
    }

    #[test]
    fn sent_bytes_arrive_complete_and_in_order() {
        let head: Vec<u8> = (0..=250).cycle().take(1344).collect();
        for backing in [Backing::Private, Backing::Shared] {
            let from = numbered(backing);
            for (way, mut send) in senders() {
                for (socket, ours, theirs) in pairs() {
                    for (shape, runs) in shapes(&from).into_iter().enumerate() {
                        let into = RamBlock::new("ram", from.len(), backing).expect("map");
                        // Other positions than the sender's.
                        let mut end = into.len();
                        let arriving: Vec<_> = runs
                            .iter()
                            .map(|run| {
                                end -= run.len();
                                into.run(end, run.len()).expect("inside")
                            })
                            .collect();
                        let head_into = RamBlock::new("head", PAGE_SIZE, backing).expect("map");
                        let head_run = head_into.run(1, head.len()).expect("inside");
                        thread::scope(|scope| {
                            scope.spawn(|| {
                                let mut scratch = IoScratch::new();
                                recv(theirs.as_fd(), &[head_run], &mut scratch).expect("head");
                                recv(theirs.as_fd(), &arriving, &mut scratch).expect("runs");
                            });
                            let sent = send(ours.as_fd(), &head, &runs);
                            if sent.is_err() {
                                cut(&ours);
                            }
                            sent.expect("send");
                        });
                        let what = format!("{backing:?}, {way}, {socket}, shape {shape}");
                        assert!(bytes(&[head_run]) == head, "{what}: head");
                        assert!(bytes(&arriving) == bytes(&runs), "{what}: runs");
                    }
                }
            }
        }
    }

    #[test]
    fn parts_arrive_one_after_the_other() {
        for (socket, ours, theirs) in pairs() {
            let into = RamBlock::new("ram", PAGE_SIZE, Backing::Private).expect("map");
            let run = into.run(0, 6).expect("inside");
            let mut scratch = IoScratch::new();
            send_parts(ours.as_fd(), &[b"ab", b"", b"cdef"], &mut scratch).expect("send");
            recv(theirs.as_fd(), &[run], &mut scratch).expect("recv");
            assert_eq!(bytes(&[run]), b"abcdef", "{socket}");
        }
    }

    #[test]
    fn a_truncated_read_is_an_error() {
        let into = RamBlock::new("ram", PAGE_SIZE, Backing::Private).expect("map");
        let mut scratch = IoScratch::new();
        for sent in [0, 1, 4095] {
            for (socket, ours, theirs) in pairs() {
                let mut file = std::fs::File::from(ours);
                file.write_all(&vec![1; sent]).expect("send");
                drop(file);
                let run = into.run(0, PAGE_SIZE).expect("inside");
                let got = recv(theirs.as_fd(), &[run], &mut scratch).map_err(|e| e.kind());
                assert_eq!(
                    got,
                    Err(io::ErrorKind::UnexpectedEof),
                    "{socket}, {sent} bytes"
                );
            }
        }
    }

    /// Sends until it fails; the test hangs if it never fails.
    fn send_until_cut(
        send: &mut Send<'_>,
        fd: BorrowedFd<'_>,
        runs: &[GuestRun<'_>],
    ) -> io::ErrorKind {
        loop {
            if let Err(e) = send(fd, b"head", runs) {
                return e.kind();
            }
        }
    }

    fn is_cut(kind: io::ErrorKind) -> bool {
        matches!(
            kind,
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
        )
    }

    #[test]
    fn a_peer_that_closes_during_a_transfer_is_an_error() {
        let block = numbered(Backing::Private);
        let runs = [block.run(0, block.len()).expect("inside")];
        for (way, mut send) in senders() {
            for (socket, ours, theirs) in pairs() {
                let kind = thread::scope(|scope| {
                    scope.spawn(|| {
                        let mut scratch = IoScratch::new();
                        let into = RamBlock::new("ram", PAGE_SIZE, Backing::Private).expect("map");
                        let run = into.run(0, PAGE_SIZE).expect("inside");
                        // The transfer is in progress when the peer disconnects.
                        recv(theirs.as_fd(), &[run], &mut scratch).expect("the first page");
                        drop(theirs);
                    });
                    send_until_cut(&mut send, ours.as_fd(), &runs)
                });
                assert!(is_cut(kind), "{way}, {socket}: {kind:?}");
            }
        }
    }

    /// The peer does not read: the sender is blocked, or about to be, when another thread shuts down its socket.
    #[test]
    fn a_socket_shut_down_elsewhere_frees_its_sender() {
        let block = numbered(Backing::Private);
        let runs = [block.run(0, block.len()).expect("inside")];
        for (way, mut send) in senders() {
            for (socket, ours, _theirs) in pairs() {
                let kind = thread::scope(|scope| {
                    let cutter = scope.spawn(|| {
                        // From outside, full queues indicate a blocked sender.
                        while !queue_is_full(ours.as_fd()) {
                            thread::yield_now();
                        }
                        cut(&ours);
                    });
                    let kind = send_until_cut(&mut send, ours.as_fd(), &runs);
                    cutter.join().expect("cut");
                    kind
                });
                assert!(is_cut(kind), "{way}, {socket}: {kind:?}");
            }
        }
    }

    fn queue_is_full(fd: BorrowedFd<'_>) -> bool {
        let mut poll = [rustix::event::PollFd::from_borrowed_fd(
            fd,
            rustix::event::PollFlags::OUT,
        )];
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        rustix::event::poll(&mut poll, Some(&now)).expect("poll") == 0
    }

    #[test]
    fn a_splicer_sends_nothing_of_a_truncated_packet() {
        let block = numbered(Backing::Private);
        let mut splicer = Splicer::new().expect("pipe");
        for (socket, ours, theirs) in pairs() {
            drop(theirs);
            let stale = [block.run(0, 64 * PAGE_SIZE).expect("inside")];
            while splicer.send(ours.as_fd(), b"", &stale).is_ok() {}
            for (_, ours, theirs) in pairs() {
                let fresh = [block.run(100 * PAGE_SIZE, PAGE_SIZE).expect("inside")];
                splicer.send(ours.as_fd(), b"", &fresh).expect("send");
                let into = RamBlock::new("ram", PAGE_SIZE, Backing::Private).expect("map");
                let run = into.run(0, PAGE_SIZE).expect("inside");
                recv(theirs.as_fd(), &[run], &mut IoScratch::new()).expect("recv");
                assert!(bytes(&[run]) == bytes(&fresh), "after {socket}");
            }
        }
    }

    proptest! {
        /// After a partial call at any position, the rest is exactly the unsent data.
        #[test]
        fn a_partial_call_leaves_exactly_the_rest(
            lens in proptest::collection::vec((0..40_usize, 0..2_usize), 0..12),
            stop in 0..500_usize,
        ) {
            let block = RamBlock::new("ram", PAGE_SIZE, Backing::Private).expect("map");
            let numbers: Vec<u8> = (0..=250).cycle().take(PAGE_SIZE).collect();
            block.write(0, &numbers).expect("inside");
            let mut offset = 0;
            let mut runs = Vec::new();
            for (len, gap) in lens {
                runs.push(block.run(offset, len).expect("inside"));
                offset += len + gap;
            }
            let all = bytes(&runs);
            let stop = stop.min(all.len());
            let mut scratch = IoScratch::new();
            let left: Vec<_> = advance(scratch.fill(&[], &runs), stop)
                .iter()
                .map(|segment| {
                    let at = segment.iov_base.addr() - block.host_addr().addr();
                    block.run(at, segment.iov_len).expect("inside")
                })
                .collect();
            prop_assert_eq!(bytes(&left), &all[stop..]);
        }
    }
}
