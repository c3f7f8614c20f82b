//! A wire between two relays that damages one byte.

use hotlift_wire::settle::QUESTION_MAGIC;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use hotlift::Address;

/// Which connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    Main,
    Channel(u8),
    /// Answers on main.
    Back,
}

/// Bits to be changed in byte `at` of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Flip {
    pub lane: Lane,
    pub at: usize,
    pub mask: u8,
}

/// Everything that came by, before it was damaged.
pub type Carried = HashMap<Lane, Vec<u8>>;

pub struct Tap {
    pub address: Address,
    stopped: Arc<AtomicBool>,
    carried: Arc<Mutex<Carried>>,
    accepting: JoinHandle<()>,
}

impl Tap {
    pub fn start(to: &Address, flip: Option<Flip>) -> Self {
        let Address::Tcp { host, port } = to else {
            panic!("relays are joined by TCP");
        };
        let to = format!("{host}:{port}");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:{}", listener.local_addr().unwrap());
        let stopped = Arc::new(AtomicBool::new(false));
        let carried = Arc::new(Mutex::new(Carried::new()));
        let accepting = {
            let (stopped, carried) = (Arc::clone(&stopped), Arc::clone(&carried));
            thread::spawn(move || accept(&listener, &to, flip, &stopped, &carried))
        };
        Self {
            address: address.parse().unwrap(),
            stopped,
            carried,
            accepting,
        }
    }

    /// Ends when both sides have closed.
    pub fn finish(self) -> Carried {
        self.stopped.store(true, Ordering::SeqCst);
        let Address::Tcp { host, port } = self.address else {
            unreachable!()
        };
        let _ = TcpStream::connect((host, port));
        self.accepting.join().unwrap();
        std::mem::take(&mut self.carried.lock().unwrap())
    }
}

fn accept(
    listener: &TcpListener,
    to: &str,
    flip: Option<Flip>,
    stopped: &AtomicBool,
    carried: &Mutex<Carried>,
) {
    thread::scope(|scope| {
        while let Ok((from, _)) = listener.accept() {
            if stopped.load(Ordering::SeqCst) {
                return;
            }
            let Ok(to) = TcpStream::connect(to) else {
                continue;
            };
            let (back_from, back_to) = (to.try_clone().unwrap(), from.try_clone().unwrap());
            scope.spawn(move || carry(from, to, None, flip, carried));
            scope.spawn(move || carry(back_from, back_to, Some(Lane::Back), flip, carried));
        }
    });
}

/// Carries one direction; which connection it is, the first bytes say.
fn carry(
    mut from: TcpStream,
    mut to: TcpStream,
    mut lane: Option<Lane>,
    flip: Option<Flip>,
    carried: &Mutex<Carried>,
) {
    let (mut held, mut buffer, mut at) = (Vec::new(), vec![0; 64 << 10], 0);
    // A question is none of the migration's connections.
    let mut is_question = false;
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        held.extend_from_slice(&buffer[..read]);
        is_question |= lane.is_none() && held.starts_with(&QUESTION_MAGIC);
        if is_question {
            if to.write_all(&held).is_err() {
                break;
            }
            held.clear();
            continue;
        }
        lane = lane.or_else(|| match held.get(..4)? {
            b"QEVM" => Some(Lane::Main),
            _ => held.get(24).map(|id| Lane::Channel(*id)),
        });
        let Some(lane) = lane else { continue };
        let mut all = carried.lock().unwrap();
        all.entry(lane).or_default().extend_from_slice(&held);
        drop(all);
        if let Some(flip) = flip.filter(|flip| flip.lane == lane)
            && (at..at + held.len()).contains(&flip.at)
        {
            held[flip.at - at] ^= flip.mask;
        }
        if to.write_all(&held).is_err() {
            break;
        }
        at += held.len();
        held.clear();
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}
