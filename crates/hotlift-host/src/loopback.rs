//! What sockets of this host cost: sending, receiving into memory that exists and into memory that does not, and passing
//! on by reference as a relay does.
//!
//! Packets are sent with the holes that zero pages leave in the sample's: a system call for many small runs of pages takes
//! a third longer than one for a whole packet.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;

use hotlift_mem::sock::{Forwarder, IoScratch, recv, send};
use hotlift_mem::{Backing, GuestRun, RamBlock};
use serde::Serialize;

use super::error::HostError;
use super::measure::timed;
use super::sample::{PACKET, Packet};
use crate::cost::{GIB, Relays, Work};

/// Memory that is sent and received: more than a core's caches hold.
const STRETCH: usize = 64 << 20;

/// How often the stretch is received into memory that exists, and how often into memory that does not.
const TIMES: usize = 2;

/// Costs are seconds of a core for a GiB.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Loopback {
    /// Sending over TCP to this host.
    pub send: f64,
    /// Receiving from it into memory that exists.
    pub receive: f64,
    /// What it takes more if the memory was never touched.
    pub first_touch: f64,
    /// With relays between.
    pub relays: Relays,
}

/// Measures all of it, with the runs of pages that `packets` have.
pub fn measure(packets: &[Packet]) -> Result<Loopback, HostError> {
    let whole = [(0, PACKET)];
    let shapes: Vec<&[(usize, usize)]> = match packets {
        [] => vec![&whole[..]],
        packets => packets.iter().map(|packet| &packet.runs[..]).collect(),
    };
    // Memory that was never touched comes first: what this process gives back it would get again, as it is. A virtual
    // machine's host takes free memory away, and a guest's destination has to fetch it from there.
    let (send_again, receive_fresh) = connection(true, &shapes)?;
    let (send, receive) = connection(false, &shapes)?;
    Ok(Loopback {
        send: f64::midpoint(send, send_again),
        receive,
        first_touch: (receive_fresh - receive).max(0.0),
        relays: relays()?,
    })
}

fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let far = listener.accept()?.0;
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
    }
    Ok((near, far))
}

/// Memory as a guest has it, written to unless it is to be `fresh`.
fn memory(fresh: bool) -> Result<RamBlock, HostError> {
    let block = RamBlock::new("stretch", STRETCH, Backing::Private)?;
    if !fresh {
        block.populate(0, STRETCH)?;
    }
    Ok(block)
}

/// Runs of a packet's pages: offset and length.
type Shape<'a> = &'a [(usize, usize)];

/// CPU of both ends of a connection over loopback, in packets, as the engine sends and receives them.
fn connection(fresh: bool, shapes: &[Shape<'_>]) -> Result<(f64, f64), HostError> {
    let (near, far) = pair().map_err(HostError::Loopback)?;
    let from = memory(false)?;
    let to = (0..if fresh { TIMES } else { 1 })
        .map(|_| memory(fresh))
        .collect::<Result<Vec<_>, _>>()?;
    let mut sending = Work::NOTHING;
    let mut receiving = Work::NOTHING;
    let (sent, received) = thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            timed(&mut receiving, || {
                let blocks = to.iter().cycle().take(TIMES);
                each_packet(blocks, shapes, |runs, scratch| {
                    recv(far.as_fd(), runs, scratch)
                })
            })
        });
        let sent = timed(&mut sending, || {
            let blocks = std::iter::repeat_n(&from, TIMES);
            each_packet(blocks, shapes, |runs, scratch| {
                send(near.as_fd(), &[], runs, scratch)
            })
        });
        // Whoever waits for more is not to wait on.
        let _ = near.shutdown(Shutdown::Both);
        (sent, receiver.join().unwrap_or(Err(HostError::Thread)))
    });
    let gib = sent? as f64 / GIB;
    received?;
    Ok((sending.cpu / gib, receiving.cpu / gib))
}

/// Calls `each` with the runs of every packet of `blocks`; says how many bytes they had.
fn each_packet<'a>(
    blocks: impl Iterator<Item = &'a RamBlock>,
    shapes: &[Shape<'_>],
    mut each: impl FnMut(&[GuestRun<'_>], &mut IoScratch) -> io::Result<()>,
) -> Result<usize, HostError> {
    let mut scratch = IoScratch::new();
    let mut shapes = shapes.iter().cycle();
    let mut runs = Vec::new();
    let mut bytes = 0;
    for block in blocks {
        for packet in (0..STRETCH).step_by(PACKET) {
            runs.clear();
            for &(at, len) in shapes.next().copied().unwrap_or_default() {
                runs.push(block.run(packet + at, len)?);
                bytes += len;
            }
            each(&runs, &mut scratch).map_err(HostError::Loopback)?;
        }
    }
    Ok(bytes)
}

/// CPU of a QEMU that sends, two relays that pass on by reference, and a QEMU that receives. A relay and its QEMU have a UNIX
/// socket between them, which costs more than TCP over loopback.
fn relays() -> Result<Relays, HostError> {
    const PACKETS: usize = STRETCH / PACKET;
    let failed = HostError::Loopback;
    let (mut out, near_in) = UnixStream::pair().map_err(failed)?;
    let (near_out, far_in) = pair().map_err(failed)?;
    let (far_out, mut into) = UnixStream::pair().map_err(failed)?;
    let mut works = [Work::NOTHING; 4];
    let [send, near, far, receive] = &mut works;
    // Each thread owns its sockets: the end of one, however early, is the end of its neighbours.
    let outcome = thread::scope(|scope| {
        let threads = [
            scope.spawn(move || {
                let memory = vec![1; STRETCH];
                timed(send, || {
                    memory
                        .chunks_exact(PACKET)
                        .try_for_each(|packet| out.write_all(packet))
                })
            }),
            scope.spawn(move || {
                let mut forwarder = Forwarder::new()?;
                timed(near, || {
                    (0..PACKETS).try_for_each(|_| {
                        forwarder.forward(near_in.as_fd(), near_out.as_fd(), &[], PACKET)
                    })
                })
            }),
            scope.spawn(move || {
                let mut forwarder = Forwarder::new()?;
                timed(far, || {
                    (0..PACKETS).try_for_each(|_| {
                        forwarder.forward(far_in.as_fd(), far_out.as_fd(), &[], PACKET)
                    })
                })
            }),
            scope.spawn(move || {
                let mut memory = vec![1; STRETCH];
                timed(receive, || {
                    memory
                        .chunks_exact_mut(PACKET)
                        .try_for_each(|packet| into.read_exact(packet))
                })
            }),
        ];
        let ended = threads.map(|thread| {
            let ended = thread.join();
            ended.unwrap_or_else(|_| Err(io::Error::other("a thread has ended early")))
        });
        ended.into_iter().collect::<io::Result<()>>()
    });
    outcome.map_err(failed)?;
    let [send, near, far, receive] = works.map(|work| work.cpu / (STRETCH as f64 / GIB));
    Ok(Relays {
        send,
        near,
        far,
        receive,
    })
}
