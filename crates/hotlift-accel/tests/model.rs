//! Tests the guarantees of the simulated device, one descriptor (job) at a time.

use hotlift_accel::idxd::descriptor::Descriptor;
use hotlift_accel::idxd::model::{Behaviour, Model};
use hotlift_accel::idxd::portal::{Portal, Submitted};
use hotlift_accel::idxd::record::{Completion, Record};

const PAGE: usize = 4096;

/// Submits and executes one descriptor.
fn run(model: &Model, descriptor: &Descriptor) {
    // SAFETY: the callers keep everything until the record is complete, which is before this returns.
    let submitted = unsafe { model.submit(descriptor) };
    assert_eq!(submitted.unwrap(), Submitted::Accepted);
    assert!(model.step(), "a descriptor waits");
}

fn is_zero(model: &Model, page: &[u8]) -> Completion {
    let record = Record::default();
    let bytes = u32::try_from(page.len()).unwrap();
    run(
        model,
        &Descriptor::is_zero(page.as_ptr(), bytes, &raw const record),
    );
    record.read()
}

/// Returns the record of one batch of all pages, and that of each page.
fn are_zero(model: &Model, pages: &[Vec<u8>]) -> (Record, Vec<Record>) {
    let records: Vec<Record> = pages.iter().map(|_| Record::default()).collect();
    let list: Vec<Descriptor> = pages
        .iter()
        .zip(&records)
        .map(|(page, record)| Descriptor::is_zero(page.as_ptr(), 4096, record))
        .collect();
    let head = Record::default();
    let count = u32::try_from(list.len()).unwrap();
    run(
        model,
        &Descriptor::batch(list.as_ptr(), count, &raw const head),
    );
    (head, records)
}

#[test]
fn a_noop_completes() {
    let model = Model::new(Behaviour::default());
    let record = Record::default();
    run(&model, &Descriptor::noop(&raw const record));
    assert_eq!(record.read(), Completion::Done { differs: false });
}

#[test]
fn any_byte_that_is_not_zero_differs() {
    let model = Model::new(Behaviour::default());
    let mut page = vec![0; PAGE];
    assert_eq!(is_zero(&model, &page), Completion::Done { differs: false });
    for at in [0, 1, 7, 8, 2000, PAGE - 1] {
        page[at] = 1;
        assert_eq!(is_zero(&model, &page), Completion::Done { differs: true });
        page[at] = 0;
    }
}

#[test]
fn a_batch_answers_for_each_of_its_members() {
    let model = Model::new(Behaviour::default());
    let mut pages = vec![vec![0; PAGE]; 128];
    for page in pages.iter_mut().step_by(3) {
        page[PAGE / 2] = 7;
    }
    let (record, records) = are_zero(&model, &pages);
    assert_eq!(record.read(), Completion::Done { differs: false });
    for (at, record) in records.iter().enumerate() {
        let differs = at % 3 == 0;
        assert_eq!(record.read(), Completion::Done { differs }, "{at}");
    }
}

#[test]
fn what_a_queue_does_not_take_is_refused() {
    let model = Model::new(Behaviour {
        max_batch: 4,
        max_transfer: 4096,
        depth: 1,
        ..Behaviour::default()
    });
    assert_eq!(
        is_zero(&model, &vec![0; 2 * PAGE]),
        Completion::Failed(0x13)
    );
    let record = Record::default();
    let list = vec![Descriptor::noop(&raw const record); 5];
    for count in [0, 1, 5] {
        let head = Record::default();
        run(
            &model,
            &Descriptor::batch(list.as_ptr(), count, &raw const head),
        );
        assert_eq!(head.read(), Completion::Failed(0x14), "{count}");
    }
    let waiting = Descriptor::noop(&raw const record);
    // SAFETY: the record outlives the model's steps.
    let submissions = unsafe { [model.submit(&waiting), model.submit(&waiting)] };
    let taken = submissions.map(Result::unwrap);
    assert_eq!(taken, [Submitted::Accepted, Submitted::Full]);
    model.die();
    // SAFETY: as above.
    assert!(unsafe { model.submit(&waiting) }.is_err());
    assert!(!model.step());
}

/// With any fault, a page is either settled correctly, or the record contains the device's progress.
#[test]
fn faults_never_make_a_wrong_answer() {
    let mut seen = [0; 4];
    for seed in 1..200 {
        let model = Model::new(Behaviour {
            seed,
            fault: 200,
            fail: 50,
            list_fault: 100,
            shuffled: true,
            ..Behaviour::default()
        });
        let mut pages = vec![vec![0_u8; PAGE]; 16];
        for (at, page) in pages.iter_mut().enumerate().skip(1).step_by(2) {
            page[at * 200] = 1;
        }
        let (head, records) = are_zero(&model, &pages);
        for (page, record) in pages.iter().zip(&records) {
            match record.read() {
                Completion::Done { differs } => {
                    assert_eq!(differs, page.iter().any(|&byte| byte != 0));
                    seen[0] += 1;
                }
                Completion::Fault { differs, completed } => {
                    assert!(!differs);
                    let done = &page[..usize::try_from(completed).unwrap()];
                    assert!(done.iter().all(|&byte| byte == 0));
                    seen[1] += 1;
                }
                Completion::Failed(code) => {
                    assert_eq!(code, 0x20);
                    seen[2] += 1;
                }
                Completion::Pending => {
                    assert_eq!(head.read(), Completion::BatchFailed);
                    seen[3] += 1;
                }
                Completion::BatchFailed => panic!("of a page"),
            }
        }
    }
    assert!(seen.iter().all(|&count| count > 20), "{seen:?}");
}

#[test]
fn a_thread_executes_what_comes_until_it_is_closed() {
    let model = Model::new(Behaviour::default());
    let records: Vec<Record> = (0..500).map(|_| Record::default()).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| model.run());
        for record in &records {
            let descriptor = Descriptor::noop(record);
            // SAFETY: the records outlive the scope, and so the thread.
            while unsafe { model.submit(&descriptor) }.unwrap() == Submitted::Full {
                std::thread::yield_now();
            }
        }
        while records
            .iter()
            .any(|record| record.read() == Completion::Pending)
        {
            std::thread::yield_now();
        }
        model.close();
    });
    assert_eq!(model.accepted(), 500);
}
