//! Guest memory for live migration: what the engine needs beside vm-memory's mapping types.
//!
//! | file | its part of the data path |
//! |---|---|
//! | `ram_block` | the mapping a page lives in, and its name on the wire |
//! | `populate` | its memory is allocated before it arrives |
//! | `userfault` | it is brought when the guest touches it |
//! | `dirty_bitmap` | it is marked, and taken to be sent |
//! | `untouched` | the kernel says that it was never written: no need to look |
//! | `numa` | it lies on a node, near some device |
//! | `zero` | it is looked at: all zero? |
//! | `guest_run` | it is copied, out or in |
//! | `stream_copy` | it is written past the caches, where nobody reads it soon |
//! | `sock`, `splice` | it goes to a socket, or comes from one, uncopied |
//! | `forward` | it goes from socket to socket, uncopied |
//!
//! `stdio` is no part of it: it needs code that runs before `main`. Neither are `error_line`, `lock` and `wait`, which all crates share.
//!
//! # Sharing memory with a running guest
//!
//! The guest writes while its pages are read, so no `&[u8]` or `&mut [u8]` to guest memory exists
//! anywhere in this crate: a reference would promise the compiler that the bytes hold still. Guest
//! bytes are reached through raw pointers only, by copies, vector loads and system calls whose
//! result is a private value. Such a read may be torn. That is harmless by the order of events that
//! every caller keeps: a page's dirty bit is fetched and cleared *before* the page is read, so a
//! write that tears the read has marked the page again, and it is sent once more.
//!
//! # Example
//!
//! ```
//! use hotlift_mem::{Backing, DirtyBitmap, PAGE_SIZE, RamBlock};
//!
//! let ram = RamBlock::new("pc.ram", 16 * PAGE_SIZE, Backing::Private)?;
//! ram.write(3 * PAGE_SIZE, b"a guest wrote this")?;
//!
//! let dirty = DirtyBitmap::new(ram.pages());
//! dirty.set(3);
//! assert_eq!(dirty.take_word(0), 1 << 3); // fetched and cleared, and only then read:
//! let mut page = [0; PAGE_SIZE];
//! ram.read(3 * PAGE_SIZE, &mut page)?;
//! assert!(page.starts_with(b"a guest wrote this"));
//! assert_eq!(dirty.count(), 0);
//! # Ok::<_, hotlift_mem::MemError>(())
//! ```

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("hotlift-mem needs 64-bit Linux");

mod cpu_time;
mod dirty_bitmap;
mod error;
mod error_line;
mod file_error;
mod forward;
mod guest_run;
mod heap;
mod lock;
mod numa;
mod populate;
mod ram_block;
pub mod sock;
mod splice;
mod stdio;
mod stream_copy;
mod tcp_info;
mod untouched;
mod userfault;
mod wait;
pub mod zero;

pub use cpu_time::{RunQueue, thread_cpu_time};
pub use dirty_bitmap::DirtyBitmap;
pub use error::MemError;
pub use error_line::error_line;
pub use file_error::FileError;
pub use forward::Forwarder;
pub use guest_run::GuestRun;
pub use heap::give_back_freed_memory;
pub use lock::lock;
pub use ram_block::{Backing, RamBlock, ram_blocks_of};
pub use splice::Splicer;
pub use stdio::stdout_was_closed;
pub use userfault::{Fault, MissingPages, Placed, Touch, UserfaultSupport, probe_userfault};
pub use wait::{end_of_process, is_readable, poll_until, wait_readable};

/// Bytes of a guest page, the unit of dirty logging and of the stream (QEMU's target page on x86
/// and most others).
pub const PAGE_SIZE: usize = 4096;
