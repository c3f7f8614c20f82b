//! Tests a migration over a link that loses the destination's last message.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

/// The destination's last message on the return path: type SHUT, 4 bytes, status 0.
const SHUT: &[u8] = &[0, 1, 0, 4, 0, 0, 0, 0];

/// Forwards one connection to `to`, and cuts it instead of forwarding SHUT. Returns its address.
pub fn loses_final_message(to: &str) -> String {
    let to = to.strip_prefix("tcp:").expect("TCP").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = format!("tcp:{}", listener.local_addr().expect("an address"));
    thread::spawn(move || {
        let (near, _) = listener.accept().expect("a source");
        let far = TcpStream::connect(to).expect("a destination");
        let both = [near, far];
        let copies = both.each_ref().map(|one| one.try_clone().expect("a copy"));
        let forward = thread::spawn(move || {
            let [mut near, mut far] = copies;
            // Ends when the connection is cut.
            let _ = std::io::copy(&mut near, &mut far);
        });
        let [mut near, mut far] = both;
        let (mut output, mut chunk) = (Vec::new(), [0; 4096]);
        while let Ok(length @ 1..) = far.read(&mut chunk) {
            output.extend_from_slice(&chunk[..length]);
            if output.windows(SHUT.len()).any(|words| words == SHUT) {
                break;
            }
            near.write_all(&chunk[..length]).expect("it listens");
        }
        for stream in [near, far] {
            let _ = stream.shutdown(Shutdown::Both);
        }
        forward.join().expect("no panic");
    });
    at
}
